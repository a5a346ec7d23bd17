"""OpenEnv in both directions: its clients use our servers' environments, and our clients use its servers' environments.

OpenEnv (huggingface/OpenEnv, read at 0.10.0) sends JSON over one WebSocket per session: `reset`, `step`, `state`,
`close`. It has no spaces, no infos, and one flag for the end of an episode. So the "observation" in our servers'
responses contains the observation, `terminated`, `truncated` and the info.

May be imported by the composition root.
"""
