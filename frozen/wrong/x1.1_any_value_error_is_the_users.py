"""Any ValueError is taken for the user's, also one of a step. Input: an engine whose step raises ValueError."""

def run_engine(config, link, make_engine):
    engine = None
    try:
        engine = make_engine(config)
        loop = EngineLoop(engine, link)
        link.send(Ready(pickle.dumps(plain(engine.setup)), loop.outputs().stats.kv_blocks_total))
        while loop.turn():
            pass
        return True
    except ValueError as error:
        link.send(Failure(str(error), True))
    except BaseException as error:
        logger.exception("the engine has failed")
        link.send(Failure(f"{type(error).__name__}: {error}"))
    finally:
        if engine is not None:
            engine.close()
    return False
