//! What events cost, as differences and ratios in one interleaved run: prefill and decode without
//! events, with them, and with msgpack; then bytes a block of `LiveSet` and `PrefixIndex`, and their
//! memory over ten million events. Fails where a limit is broken. Linux only (`/proc/self/statm`).

#![forbid(unsafe_code)]

use std::hint::black_box;
use std::process::ExitCode;
use std::time::Instant;

use kvyard_bench::events::{Producer, remove, store, token_ids};
use kvyard_bench::{BLOCK_SIZE, Engine, PROMPT_BLOCKS, PROMPT_TOKENS};
use kvyard_core::event_log::EventLog;
use kvyard_core::semantics::RemovalEvent;
use kvyard_events::{LiveSet, PrefixIndex, Prompt};

/// Nanoseconds a block that recording may add to a prefill.
const MOST_RECORDING: f64 = 60.0;

/// Nanoseconds a block for recording and msgpack together.
const MOST_PRODUCTION: f64 = 100.0;

/// By how much a decode step may become slower while changes are recorded.
const MOST_DECODE: f64 = 1.05;

/// Prefills, or decoded tokens in hundreds, of one sample. Short ones, as some then go undisturbed.
const PER_SAMPLE: u32 = 5;

const SAMPLES: usize = 4000;

/// What the program does undisturbed: the fastest hundredth of the samples ends here.
fn undisturbed(mut samples: Vec<f64>) -> f64 {
    samples.sort_by(f64::total_cmp);
    samples[samples.len() / 100]
}

/// Nanoseconds a unit.
fn timed(units: u32, mut work: impl FnMut()) -> f64 {
    let started = Instant::now();
    for _ in 0..PER_SAMPLE {
        work();
    }
    started.elapsed().as_secs_f64() * 1e9 / f64::from(PER_SAMPLE * units)
}

/// Samples of off, on, and on with msgpack, taken in turn.
fn interleaved(units: u32, mut work: impl FnMut(&mut Engine)) -> [f64; 3] {
    const NUM_BLOCKS: u32 = 64 << 10;
    let mut off = Engine::new(NUM_BLOCKS);
    let mut on = Engine::with_events(NUM_BLOCKS, true);
    let mut encoded = Engine::with_events(NUM_BLOCKS, true);
    let (mut log, mut producer) = (EventLog::default(), Producer::default());
    let mut samples = [const { Vec::new() }; 3];
    for _ in 0..SAMPLES {
        samples[0].push(timed(units, || work(&mut off)));
        samples[1].push(timed(units, || {
            work(&mut on);
            on.take_events(&mut log);
        }));
        samples[2].push(timed(units, || {
            work(&mut encoded);
            producer.drain(&mut encoded);
        }));
    }
    black_box(&producer.payload);
    // The first ones warm up.
    samples.map(|samples| undisturbed(samples[SAMPLES / 6..].to_vec()))
}

fn resident_bytes() -> f64 {
    const PAGE_BYTES: f64 = 4096.0;
    let statm = std::fs::read_to_string("/proc/self/statm").expect("this needs Linux");
    let pages = statm.split_whitespace().nth(1).and_then(|pages| pages.parse::<u32>().ok());
    f64::from(pages.expect("statm has the resident pages second")) * PAGE_BYTES
}

/// Bytes a block of something that is fed with a million of them.
fn bytes_a_block<T>(what: &str, empty: T, mut apply: impl FnMut(&mut T, &[u8])) -> T {
    const PROMPTS: u64 = 8000;
    let tokens = token_ids(PROMPT_TOKENS as usize);
    let mut fed = empty;
    let before = resident_bytes();
    let mut applying = 0.0;
    for prompt in 0..PROMPTS {
        let mut tokens = tokens.clone();
        tokens[0] = u32::try_from(prompt).expect("few prompts");
        let payload = store(prompt, u64::from(PROMPT_BLOCKS), &tokens);
        let started = Instant::now();
        apply(&mut fed, &payload);
        applying += started.elapsed().as_secs_f64();
    }
    #[expect(clippy::cast_precision_loss, reason = "a million")]
    let blocks = (PROMPTS * u64::from(PROMPT_BLOCKS)) as f64;
    let bytes = (resident_bytes() - before) / blocks;
    println!(
        "{what}: {bytes:.0} resident bytes a block, {:.0} ns to take one in",
        applying * 1e9 / blocks
    );
    fed
}

/// Ten million stores and removals of a few live blocks; growth of the resident memory in MiB.
fn growth(mut apply: impl FnMut(&[u8])) -> f64 {
    const EVENTS: u64 = 10_000_000;
    /// Blocks of a prompt.
    const BLOCKS: u64 = 100;
    const WINDOW: u64 = 20;
    let tokens = token_ids(100 * BLOCK_SIZE as usize);
    let rounds = EVENTS / (2 * BLOCKS);
    let mut settled = 0.0;
    for round in 0..rounds {
        apply(&store(round, BLOCKS, &tokens));
        if round >= WINDOW {
            apply(&remove(round - WINDOW, BLOCKS));
        }
        if round == rounds / 100 {
            settled = resident_bytes();
        }
    }
    (resident_bytes() - settled) / f64::from(1 << 20)
}

fn main() -> ExitCode {
    let mut failed = false;
    let mut limit = |what: &str, value: f64, most: f64| {
        let holds = value <= most;
        println!("{what}: {value:.2} (at most {most}){}", if holds { "" } else { " BROKEN" });
        failed |= !holds;
    };
    let [off, on, encoded] = interleaved(PROMPT_BLOCKS, Engine::prefill);
    println!(
        "prefill, ns a block of 16 tokens, stored and another evicted: {off:.1} without events, {on:.1} recorded, {encoded:.1} with msgpack"
    );
    limit("recording, ns a block", on - off, MOST_RECORDING);
    limit("recording and msgpack, ns a block", encoded - off, MOST_PRODUCTION);
    let mut engine = Engine::with_events(4 << 10, true);
    let mut producer = Producer::default();
    engine.prefill();
    producer.drain(&mut engine);
    let samples = (0..SAMPLES).map(|_| timed(PROMPT_BLOCKS, || producer.write())).collect();
    let bytes = producer.payload.len() / PROMPT_BLOCKS as usize;
    println!("msgpack alone, ns a block: {:.1}, for {bytes} bytes", undisturbed(samples));
    let [off, on, encoded] = interleaved(100, |engine| {
        for _ in 0..100 {
            engine.decode();
        }
    });
    println!(
        "decode, ns a token: {off:.1} without events, {on:.1} recorded, {encoded:.1} with msgpack"
    );
    limit("decode with events, ratio", on / off, MOST_DECODE);

    let set = bytes_a_block("LiveSet", LiveSet::new(RemovalEvent::LastCopy), |set, payload| {
        set.apply(payload).expect("a batch");
    });
    println!("LiveSet: {} bytes by its own account, {} blocks", set.num_bytes(), set.len());
    drop(set);
    let mut index = PrefixIndex::new();
    let worker = index.add_worker(RemovalEvent::LastCopy);
    let index = bytes_a_block("PrefixIndex", index, |index, payload| {
        index.apply_payload(worker, payload).expect("a batch");
    });
    println!("PrefixIndex: {} bytes by its own account", index.num_bytes());
    let tokens = token_ids(PROMPT_TOKENS as usize);
    let prompt = Prompt { token_ids: &tokens, ..Prompt::default() };
    let nanoseconds = timed(1, || {
        black_box(index.matched_tokens(black_box(&prompt)));
    });
    println!("PrefixIndex: {:.1} us for a prompt of {PROMPT_TOKENS} tokens", nanoseconds / 1e3);
    drop(index);

    let mut set = LiveSet::new(RemovalEvent::LastCopy);
    let grown = growth(|payload| set.apply(payload).expect("a batch"));
    limit("LiveSet, MiB grown over ten million events", grown, 4.0);
    let mut index = PrefixIndex::new();
    let worker = index.add_worker(RemovalEvent::LastCopy);
    let grown = growth(|payload| index.apply_payload(worker, payload).expect("a batch"));
    limit("PrefixIndex, MiB grown over ten million events", grown, 4.0);
    if failed { ExitCode::FAILURE } else { ExitCode::SUCCESS }
}
