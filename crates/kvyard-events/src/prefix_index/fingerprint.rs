//! A fingerprint of a prompt's first tokens: the polynomial of the tokens at a fixed point, modulo
//! the prime 2^61 - 1. It can be continued from a prefix by any number of tokens at once, so that it
//! does not depend on block sizes, and a block whose prefix is not known yet can be placed later.
//!
//! Two of n prefixes of m tokens agree by chance in about n^2 m / 2^61 of all cases, where nobody
//! chose the tokens to make them agree; an agreement costs a router a worse choice, no more.

/// 2^61 - 1.
const MODULUS: u64 = (1 << 61) - 1;

/// Where polynomials are taken: an arbitrary number below the modulus.
const BASE: u64 = 0x0f3c_9a1b_7d52_86e5;

const POWERS: [u64; 5] = {
    let mut powers = [1; 5];
    let mut exponent = 1;
    while exponent < 5 {
        powers[exponent] = reduce(powers[exponent - 1] as u128 * BASE as u128);
        exponent += 1;
    }
    powers
};

/// See the module. Below the modulus.
pub(super) type Fingerprint = u64;

/// The remainder of a number below 6 * 2^122: five products of remainders, and something small.
#[expect(clippy::cast_possible_truncation, reason = "each part is below 2^64")]
const fn reduce(value: u128) -> u64 {
    let once = (value & MODULUS as u128) as u64 + (value >> 61) as u64;
    let twice = (once & MODULUS) + (once >> 61);
    if twice >= MODULUS { twice - MODULUS } else { twice }
}

const fn multiply(a: u64, b: u64) -> u64 {
    reduce(a as u128 * b as u128)
}

/// One divided by the base: by Fermat, its power to the modulus minus two.
const INVERSE: u64 = power(BASE, MODULUS - 2);

/// A number to this power.
const fn power(base: u64, mut exponent: u64) -> u64 {
    let (mut result, mut square) = (1, base);
    while exponent > 0 {
        if exponent & 1 == 1 {
            result = multiply(result, square);
        }
        square = multiply(square, square);
        exponent >>= 1;
    }
    result
}

/// The fingerprint of a span, as what it adds to that of the tokens before it.
#[derive(Clone, Copy, Debug)]
pub(super) struct Span {
    value: u64,
    /// The base to the power of its length.
    factor: u64,
}

impl Span {
    pub(super) fn append_to(self, before: Fingerprint) -> Fingerprint {
        reduce(u128::from(before) * u128::from(self.factor) + u128::from(self.value))
    }

    /// The fingerprint of the tokens before a span of this length that ends here.
    pub(super) fn take_from(self, after: Fingerprint, length: u32) -> Fingerprint {
        multiply(after + MODULUS - self.value, power(INVERSE, u64::from(length)))
    }
}

/// The tokens of a span, with what else decides at their positions.
#[derive(Clone, Debug, Default)]
pub(super) struct Coefficients(Vec<u64>);

impl Coefficients {
    pub(super) fn clear(&mut self) {
        self.0.clear();
    }

    pub(super) fn extend(&mut self, token_ids: impl Iterator<Item = u32>) {
        self.0.extend(token_ids.map(u64::from));
    }

    /// A media item begins at a position.
    pub(super) fn add_media(&mut self, position: usize, identifier: &str) {
        self.add(position, text(Domain::Media, identifier.as_bytes()));
    }

    /// The span has a key that no prompt can name, such as embeddings.
    pub(super) fn add_opaque(&mut self, key: &[u8]) {
        if let Some(last) = self.0.len().checked_sub(1) {
            self.add(last, text(Domain::Opaque, key));
        }
    }

    fn add(&mut self, position: usize, value: u64) {
        if let Some(coefficient) = self.0.get_mut(position) {
            *coefficient = reduce(u128::from(*coefficient) + u128::from(value));
        }
    }

    /// The fingerprint behind these tokens, four at a time: one remainder instead of four.
    #[inline]
    pub(super) fn append_to(&self, before: Fingerprint) -> Fingerprint {
        let (fours, rest) = self.0.as_chunks::<4>();
        let mut value = before;
        for four in fours {
            let mut sum = u128::from(value) * u128::from(POWERS[4]);
            for (coefficient, power) in four.iter().zip(POWERS[..4].iter().rev()) {
                sum += u128::from(*coefficient) * u128::from(*power);
            }
            value = reduce(sum);
        }
        for coefficient in rest {
            value = reduce(u128::from(value) * u128::from(BASE) + u128::from(*coefficient));
        }
        value
    }

    pub(super) fn span(&self) -> Span {
        Span { value: self.append_to(0), factor: power(BASE, self.0.len() as u64) }
    }
}

#[derive(Clone, Copy)]
enum Domain {
    Lora = 1,
    CacheSalt,
    Media,
    Opaque,
}

fn text(domain: Domain, text: &[u8]) -> u64 {
    let mut value = domain as u64;
    for byte in text {
        // Not 0, so that the length counts.
        value = reduce(u128::from(value) * u128::from(BASE) + u128::from(*byte) + 1);
    }
    // Squared, so that sums of texts and tokens do not cancel by design.
    reduce(u128::from(value) * u128::from(value) + u128::from(BASE))
}

/// The fingerprint of no tokens, for an adapter and a salt.
pub(super) fn root(lora_name: Option<&str>, cache_salt: Option<&str>) -> Fingerprint {
    let mut value = 1;
    if let Some(name) = lora_name {
        value = reduce(u128::from(value) + u128::from(text(Domain::Lora, name.as_bytes())));
    }
    if let Some(salt) = cache_salt.filter(|salt| !salt.is_empty()) {
        value = multiply(value, BASE) ^ text(Domain::CacheSalt, salt.as_bytes());
    }
    value % MODULUS
}

#[cfg(test)]
mod tests {
    use super::*;

    /// By the definition, in plain arithmetic.
    fn plain(before: u64, coefficients: &[u64]) -> u64 {
        let modulus = u128::from(MODULUS);
        let step = |value: u128, coefficient: &u64| {
            (value * u128::from(BASE) + u128::from(*coefficient)) % modulus
        };
        u64::try_from(coefficients.iter().fold(u128::from(before), step)).unwrap()
    }

    #[test]
    fn it_is_the_polynomial_however_it_is_cut() {
        let values: Vec<u64> = (0..37_u64).map(|n| n * 0x1357_9bdf % (1 << 32)).collect();
        let whole = plain(MODULUS - 1, &values);
        assert_eq!(Coefficients(values.clone()).append_to(MODULUS - 1), whole);
        for cut in 0..=values.len() {
            let (first, second) = values.split_at(cut);
            let before = Coefficients(first.to_vec()).span().append_to(MODULUS - 1);
            assert_eq!(before, plain(MODULUS - 1, first));
            let span = Coefficients(second.to_vec()).span();
            assert_eq!(span.append_to(before), whole);
            assert_eq!(span.take_from(whole, u32::try_from(second.len()).unwrap()), before);
        }
        let largest = vec![MODULUS - 1; 9];
        assert_eq!(
            Coefficients(largest.clone()).append_to(MODULUS - 1),
            plain(MODULUS - 1, &largest)
        );
    }

    #[test]
    fn domains_are_apart() {
        let roots = [
            root(None, None),
            root(Some("x"), None),
            root(None, Some("x")),
            root(Some("x"), Some("x")),
            root(Some("xx"), None),
            root(Some("y"), Some("x")),
        ];
        for (at, value) in roots.iter().enumerate() {
            assert!(*value < MODULUS);
            assert!(!roots[..at].contains(value));
        }
        assert_eq!(root(None, Some("")), root(None, None));
    }
}
