//! Requests: R1 to R8, C03, and hashes that come and go.

use super::{
    ALIKE, SHA256, SHA256_CBOR, any_algorithm, embeds, hasher, hashes, keys, lora, media, request,
    with,
};
use kvyard_core::error::KVCacheError;
use kvyard_core::hashing::{ExtraKeySource, HashAlgorithm};
use kvyard_core::request::Request;
use kvyard_core::semantics::{HashDomains, MediaCursor, Semantics};
use proptest::prelude::*;
use std::sync::Arc;

#[test]
fn requests_r1_r2() {
    let rows = [
        (
            SHA256,
            [
                "46117ba77ad894de70dbb722c54f081d9c22d67a118e1776b7acef72235a141f",
                "138b5b26bb0e76617b5e0ed41ce28645aecd5ac545c6f92bbf3cdd3ec41834be",
                "bf2fbdd11417939502c23a39fdb05a57f98ad8d88ad97c972fad5e633bedfd5e",
            ],
        ),
        (
            SHA256_CBOR,
            [
                "8d4c7c828f1611f485f1ebfc2b19f0fe1c90d0a71d00cd90948a1fa5e8c9e91f",
                "ed6fa5d37a067707ede9aff44aa2819ab639263ca4ca66e8d36d02ffac952d33",
                "1b7047f472ffe29f9649139ce64bf3c05228f5a99bb7792568bb68f2d7410c30",
            ],
        ),
    ];
    let prompt: Vec<u32> = (0..10).collect();
    for (algorithm, expected) in rows {
        let mut request = request(&prompt, ExtraKeySource::default(), &hasher(algorithm, 4, ALIKE));
        assert_eq!(hashes(&request), expected[..2]);
        assert_eq!(request.append_output_tokens(&[10]), 0);
        assert_eq!(request.append_output_tokens(&[11]), 1);
        assert_eq!(hashes(&request), expected);
    }
}

/// Prompt and extra keys of R3 to R8.
fn prompt_and_keys(name: &str) -> (Vec<u32>, ExtraKeySource) {
    let counted = || (0..12).collect();
    match name {
        "R3" => (counted(), keys(None, &[], Some("S"), None)),
        "R4" => (counted(), keys(Some(lora("L", None)), &[], None, None)),
        "R5" | "R6" => (
            vec![1, 9, 9, 9, 9, 9, 2, 3, 8, 8, 4, 5],
            keys(None, &[("imgA", 1, 5), ("imgB", 8, 2)], None, None),
        ),
        "R7" => (vec![0; 8], keys(None, &[], None, Some(embeds(None)))),
        _ => (counted(), keys(Some(lora("L", None)), &[("imgA", 2, 4)], Some("S"), None)),
    }
}

/// R3 to R8: name, algorithm, block hashes.
const REQUESTS: [(&str, HashAlgorithm, &[&str]); 6] = [
    (
        "R3",
        SHA256_CBOR,
        &[
            "4ae1ce5b465ffc45dd54f659e12f6395ebc85033c25937434cf2abb14e59584f",
            "69c0cd86167ea268796a0990cbd17a69cb191c4502794e908fb3668c27325731",
            "dafe90e9924bd89432e7066fb6c5d1e81d02193fb752791cafbaffb8df75e336",
        ],
    ),
    (
        "R4",
        SHA256,
        &[
            "d32e0296f5a386dce0ce13763edd3725335d3d3d64ac07afee1cb7446ffd1535",
            "8395ccb5d762d2cf7bc11cc258ee418f59cfe1fd41f5619c3c75bffe9751ae21",
            "72e737d761fcf3874a9861a3dcc05c980a423835b6227acbb32800fc0baca94f",
        ],
    ),
    (
        "R5",
        SHA256_CBOR,
        &[
            "31c2665827692a3768be5a6e481b412f7db92bcf867c70bc213cbca837971b8e",
            "194ab1a14bf41ef7415c442c947ac89f4813237c4ea33ad2f8bd5a869773e455",
            "6e0db4ae41ce0401f91e11ee1c717bdf4c28ce35541bf16293b2bc5973b22da7",
        ],
    ),
    (
        "R6",
        SHA256,
        &[
            "f3c62e40e5aedf01ceac51168ea4cdaa18358b6942093fbd024e01d8cb71089c",
            "986f0fddcc3383296b48eb30f33b6b2db624ddd8efff554af195e036680ec1e2",
            "dbe21ff5922d338d43ce6e881f2eac4ba35a37dcb335e9b1c0102eb42f52b41b",
        ],
    ),
    (
        "R7",
        SHA256,
        &[
            "92370e14d03978a9761332b25fa96b26f2f3096150bd50803b5b9559e061fff9",
            "a35f5c2303db9b058db6e4feeac6e1cf8e76ac663219d1a150b1bb37414d3b9d",
        ],
    ),
    (
        "R8",
        SHA256_CBOR,
        &[
            "822d3b8b177771b6eaf3fe6aa1c33fef71c9bb9a4235a6f53fd0cac1e2613b83",
            "a04f81e8ddcb2f214933c868ba2f99dbab5452881aa8e3f752ccf5751b8ee8dd",
            "a54b17eba46101f0ee9abcc7876564b08f23aa4e7e45bfc56d813642b3ca688d",
        ],
    ),
];

#[test]
fn requests_r3_to_r8() {
    for (name, algorithm, expected) in REQUESTS {
        let (prompt, source) = prompt_and_keys(name);
        let request = request(&prompt, source, &hasher(algorithm, 4, ALIKE));
        assert_eq!(hashes(&request), expected, "{name}");
    }
}

/// C03: two media items in a block that decoding completes.
#[test]
fn c03_media_of_a_block_completed_by_decode() {
    let prompt: Vec<u32> = (0..16).chain([9; 14]).collect();
    let whole: Vec<u32> = prompt.iter().copied().chain([7, 7]).collect();
    for (cursor, domains) in [
        (MediaCursor::LastItem, HashDomains::Bare),
        (MediaCursor::LastItem, HashDomains::Tagged),
        (MediaCursor::FirstOverlap, HashDomains::Bare),
        (MediaCursor::FirstOverlap, HashDomains::Tagged),
    ] {
        let hasher = hasher(SHA256, 16, with(cursor, domains));
        let [(a, at_once_a), (z, _)] = ["A", "Z"].map(|name| {
            let source = || keys(None, &[(name, 17, 3), ("B", 22, 6)], None, None);
            let mut grown = request(&prompt, source(), &hasher);
            assert_eq!(grown.append_output_tokens(&[7, 7]), 1);
            (hashes(&grown), hashes(&request(&whole, source(), &hasher)))
        });
        assert_eq!(a[0], z[0]);
        if cursor == MediaCursor::LastItem {
            assert_eq!(a[1], z[1]);
            assert_ne!(a[1], at_once_a[1]);
        } else {
            assert_ne!(a[1], z[1]);
            assert_eq!(a[1], at_once_a[1]);
        }
        // S(P((block 0, (9,) * 14 + (7, 7), X))) with block 0 = S(P((S(P("0")), range 16, None)))
        let expected = match (cursor, domains) {
            // X = (("B", 6),)
            (MediaCursor::LastItem, HashDomains::Bare) => {
                "13878b955459ef7557d9e3d3e0f5f21547dff062880e91f78f31345ca670697f"
            }
            // X = (("A", 1), ("B", 6))
            (MediaCursor::FirstOverlap, HashDomains::Bare) => {
                "659dcdbcaa215082745f7ae1f13ba3e86c9ea5f3c7af5f3f61377fee38f4a21e"
            }
            // X = (("mm", "A", 1), ("mm", "B", 6)), "mm" one object
            (MediaCursor::FirstOverlap, HashDomains::Tagged) => {
                "734278196fd4c8c71be4ed413b007001987f30dbb8fb370c1efafdb9abc6bfa8"
            }
            // X = (("mm", "B", 6),)
            (MediaCursor::LastItem, HashDomains::Tagged) => {
                "9407012a61a929ebb475302039f55c123f509bb366e8f106931821a88314031a"
            }
        };
        assert_eq!(a[1], expected);
    }
}

/// `manager.md` W4: the hash of a block goes when its last token goes.
#[test]
fn truncation_drops_stale_hashes() {
    let hasher = hasher(SHA256, 4, ALIKE);
    let mut session = request(&[1, 2, 3, 4, 5, 6, 7], ExtraKeySource::default(), &hasher);
    session.append_output_tokens(&[8]);
    session.num_computed_tokens = 7;
    session.num_in_flight_tokens = 5;
    assert_eq!(session.block_hashes().len(), 2);
    session.truncate(7).unwrap();
    assert_eq!(session.block_hashes().len(), 1);
    assert_eq!(session.extend_prompt(&[80, 90], Vec::new()), Ok(1));
    assert_eq!(session.num_prompt_tokens(), 9);
    let fresh = request(&[1, 2, 3, 4, 5, 6, 7, 80, 90], ExtraKeySource::default(), &hasher);
    assert_eq!(session.block_hashes(), fresh.block_hashes());

    session.truncate(4).unwrap();
    assert_eq!(session.block_hashes().len(), 1);
    session.truncate(3).unwrap();
    assert!(session.block_hashes().is_empty());
    let view = session.view();
    assert_eq!((view.num_tokens, view.num_prompt_tokens), (3, 3));
    assert_eq!((view.num_computed_tokens, view.num_in_flight_tokens), (3, 3));
    let error = session.truncate(4).unwrap_err();
    assert!(matches!(error, KVCacheError::InvalidArgument { argument: "num_tokens", .. }));
}

/// `manager.md` W5: both media items of a streaming update must be in the keys.
#[test]
fn streaming_media() {
    let update = |name| media(&[(name, 1, 2), ("B", 4, 2)]);
    for (cursor, seen) in [(MediaCursor::LastItem, false), (MediaCursor::FirstOverlap, true)] {
        let hasher = hasher(SHA256, 8, with(cursor, HashDomains::Bare));
        let [a, z] = ["A", "Z"].map(|name| {
            let mut session = request(&[0; 9], ExtraKeySource::default(), &hasher);
            assert_eq!(session.extend_prompt(&[5; 8], update(name)), Ok(1));
            assert_eq!(session.keys().media()[0].offset, 10);
            session
        });
        assert_eq!(a.block_hashes()[0], z.block_hashes()[0]);
        assert_eq!(a.block_hashes()[1] != z.block_hashes()[1], seen);

        let tokens: Vec<u32> = [0; 9].into_iter().chain([5; 8]).collect();
        let at_once =
            request(&tokens, keys(None, &[("A", 10, 2), ("B", 13, 2)], None, None), &hasher);
        assert_eq!(a.block_hashes() == at_once.block_hashes(), seen);
    }
}

#[test]
fn a_refused_update_changes_nothing() {
    let hasher = hasher(SHA256, 4, Semantics::default());
    let mut session = request(&[1, 2, 3, 4, 5], keys(None, &[("A", 4, 1)], None, None), &hasher);
    let before = (session.block_hashes().to_vec(), session.view(), session.keys().clone());
    assert!(session.extend_prompt(&[6], media(&[("B", 3, 1), ("C", 2, 1)])).is_err());
    assert!(session.extend_prompt(&[6], media(&[("B", u32::MAX, 1)])).is_err());
    let after = (session.block_hashes().to_vec(), session.view(), session.keys().clone());
    assert_eq!(before, after);

    // A media item goes with the token that it starts at.
    session.truncate(4).unwrap();
    assert!(session.keys().is_empty());
}

#[test]
fn a_request_without_hasher_has_no_hashes() {
    let mut plain = Request::new("r", vec![1; 64], Arc::default(), None);
    assert_eq!(plain.append_output_tokens(&[1; 64]), 0);
    assert_eq!(plain.extend_prompt(&[1; 64], Vec::new()), Ok(0));
    plain.truncate(100).unwrap();
    assert!(plain.block_hashes().is_empty());
    assert_eq!(plain.num_output_tokens(), 0);
    assert!(plain.call(false).content.is_none());
    let call = plain.call(true);
    assert_eq!(call.request_id, "r");
    assert_eq!(call.content.unwrap().token_ids.len(), 100);
}

proptest! {
    /// Under `FirstOverlap` it does not matter how the tokens came; under `LastItem` it does not
    /// matter whether outputs came one by one or together.
    #[test]
    fn incremental_equals_at_once(
        algorithm in any_algorithm(),
        block_size in prop::sample::select(vec![1_u32, 2, 3, 4, 16, 65, 100]),
        tokens in prop::collection::vec(0..150_000_u32, 1..250),
        mut items in prop::collection::vec((0..250_u32, 0..40_u32), 0..6),
        tagged in any::<bool>(),
        cuts in prop::collection::vec(0..250_usize, 0..5),
    ) {
        items.sort_unstable();
        let items: Vec<_> = items.into_iter().map(|(offset, length)| ("m", offset, length)).collect();
        let domains = if tagged { HashDomains::Tagged } else { HashDomains::Bare };
        for cursor in [MediaCursor::FirstOverlap, MediaCursor::LastItem] {
            let hasher = hasher(algorithm, block_size, with(cursor, domains));
            let source = || keys(None, &items, Some("s"), None);
            let mut cuts: Vec<_> = cuts.iter().map(|cut| cut % tokens.len()).collect();
            cuts.sort_unstable();
            let first = cuts.first().copied().unwrap_or(0);
            let mut pieces = request(&tokens[..first], source(), &hasher);
            let mut single = pieces.clone();
            let mut previous = first;
            for cut in cuts.into_iter().chain([tokens.len()]) {
                pieces.append_output_tokens(&tokens[previous..cut]);
                previous = cut;
            }
            for token in &tokens[first..] {
                single.append_output_tokens(&[*token]);
            }
            prop_assert_eq!(pieces.block_hashes(), single.block_hashes());
            prop_assert_eq!(pieces.block_hashes().len(), tokens.len() / block_size as usize);
            if cursor == MediaCursor::FirstOverlap {
                let at_once = request(&tokens, source(), &hasher);
                prop_assert_eq!(pieces.block_hashes(), at_once.block_hashes());
            }
        }
    }
}
