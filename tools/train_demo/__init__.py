"""Makes the embedded demo model: text, target, drafters, quantization, figures."""
