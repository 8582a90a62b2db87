"""report.html: one page that shows what a run did.

Reads the record through diagnosis.
"""
