"""OpenEnv, both ways: its clients play the environments of our servers, and its servers' environments play here.

OpenEnv (huggingface/OpenEnv, read at 0.10.0) sends JSON over one WebSocket a session: `reset`, `step`, `state`,
`close`. It has no spaces, no infos, and one flag for the end of an episode. So what a server of ours answers holds the
observation, `terminated`, `truncated` and the info side by side as the "observation" of OpenEnv.

May be imported by the composition root.
"""
