//! A manager of one group: the worked examples of the specification, cases from the field, misuse,
//! rows and plans. Expected values are the specification's or reckoned by hand.

mod cases;
mod harness;
mod misuse;
mod rows;
mod statistics;
mod worked_examples;
