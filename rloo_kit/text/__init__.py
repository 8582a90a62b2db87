"""Text helpers in pure Python.

``wording`` formats values, errors and durations for messages. ``redaction`` masks API keys and
access tokens. ``numbers`` picks out finite numbers. ``chat_templates`` finds the tokens that end a
completion, and ``thoughts`` finds the thought (the reasoning) in it. The package does not depend on
models, runs or settings.
"""
