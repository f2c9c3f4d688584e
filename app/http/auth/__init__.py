"""Who a request comes from and what that caller may do."""
