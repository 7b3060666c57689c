"""Where the twelve rules of the design are shown, and that those tests exist.

 1. The model is pure: a step changes no module, no weight, and gives the same bits for the same inputs.
 2. Device state has one owner and one thread.
 3. The HTTP edge never blocks its loop and never touches an array.
 4. After warm-up nothing compiles, whatever the traffic asks for.
 5. Every tensor of a file is used once and every leaf filled once, or loading fails with the list.
 6. Rows nobody uses write nothing.
 7. A row's result depends on its own session alone.
 8. Chunking changes nothing.
 9. One finish for each request, in order, and the slot always comes back.
10. The cost of a decode step follows the live context, not the capacity.
11. Real and warm-up batches come from one constructor.
12. A donated cache read again is our error, with the step's name.
"""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

TESTS = Path(__file__).parent

# rule -> (file, test) pairs
SHOWN_BY: dict[int, list[tuple[str, str]]] = {
    1: [
        ("model/test_steps.py", "test_a_step_changes_no_attribute_of_the_model"),
        ("engine/test_runner.py", "test_a_step_is_pure"),
    ],
    2: [("test_layering.py", "test_guarded_packages"), ("engine/test_loop.py", "test_requests_from_many_threads_get_their_own_tokens")],
    3: [("test_layering.py", "test_arrows"), ("test_layering.py", "test_the_edge_and_the_command_load_no_jax")],
    4: [
        ("engine/test_exact_batches.py", "test_mixed_traffic_compiles_nothing"),
        ("engine/test_runner.py", "test_a_second_start_compiles_nothing"),
    ],
    5: [
        ("model/test_binding.py", "test_every_tensor_is_asked_for_once_and_loaded_once"),
        ("model/test_binding.py", "test_a_missing_tensor_is_named"),
        ("model/test_binding.py", "test_a_tensor_nobody_uses_is_named"),
        ("model/test_binding.py", "test_another_shape_is_named_with_both_shapes"),
    ],
    6: [
        ("engine/test_runner.py", "test_a_decode_step_changes_the_slots_of_its_rows_alone"),
        ("engine/test_runner.py", "test_a_prefill_step_changes_its_slot_alone_and_no_row_past_its_tokens"),
    ],
    7: [
        ("engine/test_runner.py", "test_logits_are_bit_equal_whatever_the_index_and_the_neighbours"),
        ("engine/test_runner.py", "test_buckets_agree_bit_for_bit"),
        ("engine/test_exact_batches.py", "test_texts_are_the_same_in_company"),
        ("engine/test_exact_batches.py", "test_texts_are_the_same_while_neighbours_join_and_leave"),
    ],
    8: [
        ("model/test_oracle.py", "test_logits_and_best_tokens"),
        ("engine/test_exact.py", "test_prefill_in_uneven_pieces"),
        ("engine/test_exact.py", "test_decode_from_the_first_token_in_every_bucket"),
        ("engine/test_exact.py", "test_decode_after_prefill_beside_others"),
    ],
    9: [
        ("engine/test_schedules.py", "Schedules"),
        ("engine/test_runner_failures.py", "test_a_failed_step_ends_its_batch_and_the_next_request_is_exact"),
    ],
    10: [("model/test_steps.py", "test_scratch_of_a_decode_step_does_not_grow_with_the_context")],
    11: [("engine/test_runner.py", "test_warm_up_and_real_steps_share_their_constructor")],
    12: [
        ("engine/test_runner.py", "test_a_consumed_cache_says_which_step_has_it"),
        ("engine/test_runner.py", "test_a_step_that_fails_midway_leaves_no_cache_to_misuse"),
    ],
}


@pytest.mark.parametrize("rule", range(1, 13))
def test_every_rule_is_shown_by_tests_that_exist(rule: int) -> None:
    assert SHOWN_BY[rule]
    for file, name in SHOWN_BY[rule]:
        tree = ast.parse((TESTS / file).read_text(encoding="utf-8"))
        tests = {node.name for node in ast.walk(tree) if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef)}
        assert name in tests, f"rule {rule}: {file} has no {name}"
