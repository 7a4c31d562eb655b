"""dakrun on a Ray cluster: DakrunProcessor for Ray Data, and `dakrun generate --ray`.

processor.py is the class for Dataset.map_batches. For generate, run.py puts the pieces together:
inputs.py reads files, folders and URLs, cluster.py finds Ray and counts workers, dispatch.py hands
rows to the workers of worker.py and takes their results, parts.py writes these. Both compute in a
thread (model_thread.py), with a model loaded for the node (node.py); requests/arrow.py has the
tables.

The imports of this package need Ray: pip install 'dakrun[ray]'.
"""

from dakrun.ray.processor import DakrunProcessor

__all__ = ["DakrunProcessor"]
