"""Words that questions are varied with."""

# Words that a hurried writer leaves out without changing what is asked.
DROPPABLE = {
    "the",
    "a",
    "an",
    "is",
    "do",
    "does",
    "to",
    "i",
    "of",
    "my",
    "this",
    "it",
    "in",
    "for",
    "are",
    "please",
    "can",
}
FILLERS = [
    "actually",
    "really",
    "just",
    "maybe",
    "currently",
    "exactly",
    "still",
    "simply",
    "then",
    "even",
    "usually",
    "best",
]
SWAPS = {
    "i": ["we", "one", "you", "somebody", "i"],
    "my": ["the", "our", "this", "a"],
    "a": ["the", "some", "one", "any", "this"],
    "the": ["my", "a", "this", "our", "that"],
    "see": ["view", "look at", "find", "check", "read"],
    "show": ["display", "list", "give", "print", "tell"],
    "want": ["wish", "would like", "would love", "have", "plan", "intend"],
    "need": ["want", "have", "would like"],
    "use": ["employ", "work with", "make use of", "try"],
    "command": ["instruction", "cli command", "call", "line"],
    "machine": ["computer", "box", "laptop", "pc", "workstation", "server"],
    "computer": ["machine", "box", "laptop", "pc"],
    "way": ["method", "trick", "possibility"],
    "which": ["what"],
    "what": ["which"],
    "explain": ["describe", "clarify", "illustrate", "outline", "spell out"],
    "tell": ["explain", "show", "give"],
    "mean": ["stand for", "refer to", "signify"],
    "model": ["llm", "language model", "checkpoint"],
    "models": ["llms", "language models", "checkpoints"],
    "memory": ["ram", "my memory"],
    "disk": ["hard disk", "drive", "ssd"],
    "answer": ["response", "reply", "output", "completion"],
    "prompt": ["input", "text", "message"],
    "server": ["daemon", "service", "llmbox server"],
    "daemon": ["server", "service", "llmbox daemon"],
    "big": ["large", "huge"],
    "fast": ["quick", "speedy"],
    "create": ["make", "produce", "set up"],
    "change": ["alter", "modify", "adjust"],
    "get": ["obtain", "have", "receive"],
    "can": ["could", "may", "might"],
    "could": ["can", "would"],
    "does": ["would", "will", "did"],
    "do": ["would", "could", "should", "must", "might"],
    "is": ["was", "would be", "'s"],
    "how": ["in what way", "by what means"],
    "file": ["document"],
    "folder": ["directory"],
    "gpu": ["graphics card", "card", "gpus"],
    "run": ["execute", "use", "enter", "type"],
    "useful": ["helpful", "good"],
    "request": ["call", "api request", "query"],
    "requests": ["calls", "api requests", "queries"],
}
# Verbs that double their last letter before -ing.
_DOUBLED = {
    *("ban", "begin", "cap", "chat", "cut", "drop", "get", "grab", "let", "log"),
    *("pin", "plan", "put", "quit", "run", "set", "shut", "spin", "stop", "unpin", "win"),
}
FRAMES = [
    "i was wondering {q}",
    "would you mind telling me {q}",
    "do you happen to know {q}",
    "my colleague asks {q}",
    "i have been asking myself {q}",
    "i'd be interested to know {q}",
    "my boss wants to know {q}",
    "could you tell me {q}",
    "can you tell me {q}",
    "let me ask {q}",
    "i would like to know {q}",
    "tell me {q}",
    "i wonder {q}",
    "please tell me {q}",
    "what i want to know is {q}",
    "i'm not sure about this: {q}",
    "for what it's worth {q}",
    "maybe you can tell me {q}",
]


def gerund(phrase: str) -> str:
    """`stop a request` as `stopping a request`: the first word is a verb."""
    verb, _, rest = phrase.partition(" ")
    if verb.endswith("ie"):
        stem = verb[:-2] + "y"
    elif verb in _DOUBLED:
        stem = verb + verb[-1]
    elif verb.endswith("e") and not verb.endswith("ee") and len(verb) > 2:
        stem = verb[:-1]
    else:
        stem = verb
    return f"{stem}ing {rest}".rstrip()
