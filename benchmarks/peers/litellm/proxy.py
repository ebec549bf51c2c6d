"""LiteLLM's proxy, as its own `litellm` command starts it. Runs in its own venv.

python proxy.py --config config.yaml --port 7690 [--num_workers 2]
"""

from litellm import run_server

if __name__ == "__main__":
    run_server()
