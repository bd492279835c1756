"""``--precision auto``: measures what each layer loses in each number format, then searches for the
smallest or fastest assignment within the accuracy budget.
"""
