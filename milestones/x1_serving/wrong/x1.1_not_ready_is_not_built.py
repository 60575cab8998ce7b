"""Takes a ValueError for the user's until Ready is said: a fault of ours behind the building is told without type and traceback."""


def run_engine(config, link, make_engine):
    engine = None
    ready = False
    try:
        engine = make_engine(config)
        loop = EngineLoop(engine, link)
        link.send(Ready(pickle.dumps(plain(engine.setup)), loop.outputs().stats.kv_blocks_total))
        ready = True
        while loop.turn():
            pass
        return True
    except Exception as error:
        user = not ready and isinstance(error, ValueError)
        if not user: logger.exception("x")
        link.send(Failure(str(error) if user else f"{type(error).__name__}: {error}", user))
        return False
    finally:
        if engine is not None:
            engine.close()
