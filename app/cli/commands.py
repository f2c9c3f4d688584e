"""The list of commands: name, where it lives, its line in `llmbox --help`."""

COMMANDS: dict[str, tuple[str, str]] = {
    "up": (".up:up", "Start the daemon in the background and wait until it is ready."),
    "serve": (".serve:serve", "Run the daemon in the foreground."),
    "down": (".lifecycle:down", "Let open requests finish, then stop the daemon."),
    "restart": (".lifecycle:restart", "Stop the daemon and start it as it was."),
    "status": (".status:status", "Show whether the daemon runs; exit 3 when it does not."),
    "run": (".run:run", "Chat with a model, or ask it one thing."),
    "ps": (".models:ps", "List the models in memory."),
    "ls": (".models:ls", "List the models on disk."),
    "show": (".models:show", "Show what is known of one model."),
    "load": (".load:load", "Load a model into the running daemon."),
    "unload": (".load:unload", "Take a model out of memory."),
    "requests": (".requests:requests", "Read the request log, follow it, cancel a request."),
    "logs": (".logs:logs", "Read the daemon's log."),
    "stats": (".stats:stats", "Show load and speed of this moment."),
    "config": (".config:config", "Show and change settings."),
    "doctor": (".doctor:doctor", "Check this box; every finding comes with its fix."),
    "bench": (".bench:bench", "Measure a server: time to first token, throughput."),
    "version": (".version:version", "Print the version."),
    "completion": (".completion:completion", "Print a shell's completion script."),
}
