"""report.html: one self-contained page about a run, or a comparison of several.

``page.write_report`` is the entry. Reads run folders as the ``diagnosis`` package does, and never a
trainer: a run that was killed, or still trains, can be reported.
"""
