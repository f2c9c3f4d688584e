"""`llmbox top`: the terminal dashboard. Reads the event stream and the admin API, and nothing else.

    feed thread ──messages──▶ Dashboard (app.py) ──applies to──▶ State ──Changed──▶ the screen that is shown
    screen ──a message for each wish (Cancel, Load, ...)──▶ Dashboard ──worker──▶ admin API

Data goes one way: screens draw `State` and never change it.
"""
