"""The code that moves bytes between ranks: one interface, a file for each transport, and their table (choose.py)."""
