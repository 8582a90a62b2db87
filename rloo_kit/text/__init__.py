"""Plain text helpers: short forms of values and errors, secret masking, chat templates.

Pure Python; knows nothing of models, runs or settings.
"""
