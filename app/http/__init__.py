"""The HTTP shell: server, checks that hold for every route, and the routes themselves."""
