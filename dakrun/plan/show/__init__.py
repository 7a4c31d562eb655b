"""Plans for people and scripts: tables, JSON, sentences and pictures."""
