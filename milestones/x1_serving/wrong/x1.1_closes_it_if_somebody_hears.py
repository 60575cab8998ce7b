"""Closes the engine after the last word. Where the server is gone that word raises, and the ranks and their memory stay."""


def run_engine(config, link, make_engine):
    engine = None
    try:
        engine = make_engine(config)
        loop = EngineLoop(engine, link)
        link.send(Ready(pickle.dumps(plain(engine.setup)), loop.outputs().stats.kv_blocks_total))
        while loop.turn():
            pass
        engine.close()
        return True
    except Exception as error:
        user = engine is None and isinstance(error, ValueError)
        if not user: logger.exception("x")
        link.send(Failure(str(error) if user else f"{type(error).__name__}: {error}", user))
        if engine is not None:
            engine.close()
        return False
