"""The trainer: a GPT on any mesh, from the strategies of the other folders."""
