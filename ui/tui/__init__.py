"""`llmbox top`, the terminal dashboard. Its only sources are the event stream and the admin API.

    feed thread ──messages──▶ Dashboard (app.py) ──updates──▶ State ──Changed──▶ the visible screen
    screen ──one message for each action (cancel, load, ...)──▶ Dashboard ──worker──▶ admin API

Data flows one way: screens draw `State` and never change it.
"""
