"""The layers of the models, over block tables, and the arithmetic they are made of."""
