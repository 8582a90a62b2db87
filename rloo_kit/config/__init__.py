"""The run file and its settings: sections, trainer settings, older names, engine tables.

Reads YAML and checks it; loads neither torch nor TRL.
"""
