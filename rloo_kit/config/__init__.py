"""The run file and its settings, checked without torch or TRL.

``settings`` has the table of all trainer settings. ``run_file`` reads YAML and ``--set``.
``trainer_settings`` checks the trainer settings, translates the names of other trainers, and
computes the sizes of a batch. ``engine_tables`` checks the sections ``unsloth:`` and ``vllm:``.
This package must not import the packages for models, data or training.
"""
