"""Answers that must have a form: what guides a request's tokens, and whether its answer has it.

Knows requests and completions; knows nothing of slots and steps.
"""

from dakrun.grammars import Grammars, Guidance, is_valid
from dakrun.requests import Completion, Request


def guidance_of(request: Request, grammars: Grammars | None) -> Guidance | None:
    """What guides the tokens of `request`; None if all are allowed.

    Raises UsageError for a form that no grammar can follow, and ValueError without `grammars`.
    """
    params, thought = request.params, request.reply.thought
    form = params.structured_outputs
    budget = params.thinking_token_budget if thought else None
    if form is None and budget is None:
        return None
    if grammars is None:
        raise ValueError("the form of answers needs a tokenizer")
    if form is not None:
        grammars.matcher(form)
    markers, begun = (thought.markers, thought.begun) if thought else (None, False)
    return Guidance(grammars, form, markers, begun, budget)


def has_form(
    completion: Completion, request: Request, grammars: Grammars, *, ended: bool
) -> bool | None:
    """Whether an answer is finished and has the form it must have; None if any text will do.

    `ended`: its last token is an end token, which a grammar allows only where an answer is whole.
    """
    form = request.params.structured_outputs
    if form is None:
        return None
    if completion.finish_reason == "length":
        return False
    answer = completion.answer
    text = (answer.content if answer else completion.text) or ""
    if not (ended or grammars.accepts(form, text)):
        return False
    return form.strict or form.kind != "json" or is_valid(form, text)
