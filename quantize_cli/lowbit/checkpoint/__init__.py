"""Models on disk: `source` opens them, `formats` names how quantized layers look, `sink` writes."""
