"""Constraints on the tokens that a request may draw next: budgets of thoughts, and grammars."""
