"""What `read x1` traces."""

import threading


def run(preset: str, enter) -> None:
    from folovllm.pool import Pool
    from folovllm.tap import drain

    enter("opening the tap")
    thread = threading.Thread(target=drain, args=[Pool(2)])
    thread.start()
    thread.join()
