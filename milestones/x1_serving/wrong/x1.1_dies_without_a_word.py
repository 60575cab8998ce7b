"""Lets an exception end the thread. Nobody hears of it, and every stream waits for a token that never comes."""


def run_engine(config, link, make_engine):
    engine = make_engine(config)
    try:
        loop = EngineLoop(engine, link)
        link.send(Ready(pickle.dumps(plain(engine.setup)), loop.outputs().stats.kv_blocks_total))
        while loop.turn():
            pass
        return True
    finally:
        engine.close()
