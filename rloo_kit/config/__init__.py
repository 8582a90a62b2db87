"""The run file and its settings, checked without torch or TRL.

``settings.py`` is the one table of trainer settings; ``run_file.py`` reads YAML and ``--set``;
``trainer_settings.py`` knows TRL's names, older names and the batch; ``engine_tables.py`` the
tables ``unsloth:`` and ``vllm:``. Must not know models, data or training.
"""
