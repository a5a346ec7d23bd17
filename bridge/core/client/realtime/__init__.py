"""Real-time worlds: what their answers tell besides observations, and Steps in flight."""
