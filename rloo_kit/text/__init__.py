"""Text helpers in pure Python.

``wording`` formats values, errors and durations for messages. ``redaction`` masks API keys and
access tokens. ``numbers`` picks out finite numbers. ``chat_templates`` finds the token that ends a
turn, and ``thoughts`` finds the thought (the reasoning) in a completion. The package does not
depend on models, runs or settings.
"""
