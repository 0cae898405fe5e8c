"""Are our answers those of `transformers`, token for token? The outside truth, and the proof that it would notice.

checkpoints, prompts          a random model scaled to react to every fault, and 200 conversations with pictures
reference, compare            the stock model, one prompt at a time; exact but for the reference's own ties
test_parity_matrix            every topology, cache state and concurrency (`make verify-parity`: all prompts)
test_parity_runner            the same below the engine: chunks, batch mixes, scattered pages
test_parity_witness           what the random model reacts to, shown in the stock model
test_parity_can_fail          the comparison fails when a fault is planted in the cluster
test_planted_faults           the demo model's answers change under the same faults (`witnesses.json`)
"""
