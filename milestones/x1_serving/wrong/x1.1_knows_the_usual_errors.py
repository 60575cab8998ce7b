"""Catches the errors that one thinks of. A KeyError ends the thread without a word, and every stream waits for ever."""


def run_engine(config, link, make_engine):
    engine = None
    try:
        engine = make_engine(config)
        loop = EngineLoop(engine, link)
        link.send(Ready(pickle.dumps(plain(engine.setup)), loop.outputs().stats.kv_blocks_total))
        while loop.turn():
            pass
        return True
    except (RuntimeError, ValueError, OSError) as error:
        user = engine is None and isinstance(error, ValueError)
        if not user: logger.exception("x")
        link.send(Failure(str(error) if user else f"{type(error).__name__}: {error}", user))
        return False
    finally:
        if engine is not None:
            engine.close()
