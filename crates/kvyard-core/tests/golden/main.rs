//! What vLLM 0.25.1 answered, call by call: every value must be equal under its semantics. The
//! committed subset, one scenario of each family, always; the whole recording where the material is.

mod pool_ops;
mod replay;

use std::collections::BTreeMap;
use std::fs::File;
use std::io::{BufRead, BufReader, Write};
use std::path::{Path, PathBuf};

use flate2::read::GzDecoder;
use serde_json::Value;

use replay::{Replay, text};

/// The families of the recording.
const NUM_FAMILIES: usize = 74;

fn repository() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../..")
}

fn scenarios(path: &Path) -> impl Iterator<Item = Value> {
    let file = File::open(path).unwrap_or_else(|error| panic!("{}: {error}", path.display()));
    BufReader::new(GzDecoder::new(file))
        .lines()
        .map(|line| serde_json::from_str(&line.unwrap()).unwrap())
}

fn family(scenario: &Value) -> &str {
    text(scenario, "name").rsplit_once('-').unwrap().0
}

#[derive(Default)]
struct Tally {
    scenarios: BTreeMap<String, usize>,
    operations: usize,
    differences: Vec<String>,
}

impl Tally {
    /// Replays up to the first difference, with the invariants checked every `validate_every`
    /// operations and at the end.
    fn replay(&mut self, scenario: &Value, validate_every: usize) {
        let mut replay = Replay::new(&scenario["config"]);
        *self.scenarios.entry(family(scenario).into()).or_default() += 1;
        for (number, op) in scenario["ops"].as_array().unwrap().iter().enumerate() {
            if let Some(difference) = replay.step(op) {
                let name = text(scenario, "name");
                let op = &op.to_string();
                let shown = op.get(..400).unwrap_or(op);
                self.differences
                    .push(format!("{name}, operation {number}: {shown}\n     {difference}"));
                return;
            }
            self.operations += 1;
            if number % validate_every == 0 {
                replay.validate();
            }
        }
        replay.validate();
    }

    fn assert_equal(&self) {
        let shown = &self.differences[..self.differences.len().min(3)];
        assert!(
            shown.is_empty(),
            "{} scenarios differ; the first:\n{}",
            self.differences.len(),
            shown.join("\n")
        );
    }
}

#[test]
fn the_committed_subset_is_equal() {
    let mut tally = Tally::default();
    for scenario in scenarios(&repository().join("tests/golden/subset.jsonl.gz")) {
        tally.replay(&scenario, 20);
    }
    tally.assert_equal();
    assert_eq!(tally.scenarios.len(), NUM_FAMILIES);
}

/// `KVYARD_MATERIAL` names the folder with `golden/`; without it, `../shared` beside the repository.
#[test]
fn the_whole_recording_is_equal() {
    let material = std::env::var_os("KVYARD_MATERIAL")
        .map_or_else(|| repository().join("../shared"), PathBuf::from);
    let path = material.join("golden/vllm-0.25.1.jsonl.gz");
    if !path.exists() {
        // Past the capture of test output: whoever reads "ok" must see this too.
        let mut stderr = std::io::stderr();
        writeln!(stderr, "SKIPPED: no {}; set KVYARD_MATERIAL", path.display()).unwrap();
        return;
    }
    let mut tally = Tally::default();
    for scenario in scenarios(&path) {
        tally.replay(&scenario, 100);
    }
    tally.assert_equal();
    let scenarios: usize = tally.scenarios.values().sum();
    println!("{scenarios} scenarios, {} operations, 0 differences", tally.operations);
    assert_eq!((scenarios, tally.operations), (733, 657_515));
}
