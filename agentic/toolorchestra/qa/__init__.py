"""Question answering: the tools search, enhance_reasoning and answer over a state that each turn shows anew."""
