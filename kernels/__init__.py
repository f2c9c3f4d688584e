"""Every hot operation once: its meaning in plain torch, and faster versions behind one dispatch."""
