"""Constraints on the tokens that a request may draw next: reasoning budgets and grammars."""
