"""The one loop every task runs through."""
