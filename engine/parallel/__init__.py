"""One model on several processes: layers shared (tensor parallel), or in stages (pipeline parallel)."""
