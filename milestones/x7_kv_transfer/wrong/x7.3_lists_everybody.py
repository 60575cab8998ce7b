"""Lists every request, those that lost nothing with the end of their tokens: all are taken out of their batch."""


def requests_to_recompute(tables, num_computed, lost, block_size):
    begin = {}
    for request, table in tables.items():
        place = next((i * block_size for i, block in enumerate(table) if block in lost), num_computed[request])
        begin[request] = min(place, num_computed[request])
    return begin
