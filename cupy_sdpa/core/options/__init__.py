"""The options of a call: one table, and a module for each option with parsing or a formula of its own."""
