"""Plain text helpers, in pure Python.

``wording``: short forms of values, errors and durations for messages. ``redaction``: masks keys and
tokens. ``chat_templates`` and ``thoughts``: what a tokenizer says about turns and thoughts. Knows
nothing of models, runs or settings.
"""
