"""SQL of the request log. Imports SQLAlchemy, so only the store's threads import this package."""
