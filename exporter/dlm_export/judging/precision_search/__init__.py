"""``--precision auto``: chooses a number format for each layer.

``sensitivity`` measures what each layer loses in each format. ``search`` then finds the smallest or
fastest choice of formats that keeps the loss within the budget.
"""
