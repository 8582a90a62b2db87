"""Plain text helpers, in pure Python.

``wording``: short forms of values, errors and durations for messages. ``redaction``: masks keys and
tokens. ``numbers``: finite numbers. ``chat_templates`` and ``thoughts``: ends of turns and marks of
thoughts. The package knows nothing of models, runs or settings.
"""
