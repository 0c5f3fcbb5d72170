//! JSON objects whose keys are unique.

use std::collections::BTreeMap;
use std::collections::btree_map::Entry;
use std::fmt;
use std::marker::PhantomData;

use serde::de::{Error, IgnoredAny, MapAccess, Visitor};
use serde::{Deserialize, Deserializer};

/// The key of a safetensors header that is no tensor.
const METADATA: &str = "__metadata__";

/// Values by tensor. An object that names one twice is refused: readers differ in which one counts.
#[derive(Debug)]
pub(crate) struct ByTensor<V>(pub(crate) BTreeMap<String, V>);

impl<'de, V: Deserialize<'de>> Deserialize<'de> for ByTensor<V> {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        deserializer.deserialize_map(ByTensorVisitor(PhantomData))
    }
}

struct ByTensorVisitor<V>(PhantomData<V>);

impl<'de, V: Deserialize<'de>> Visitor<'de> for ByTensorVisitor<V> {
    type Value = ByTensor<V>;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("an object with an entry for each tensor")
    }

    fn visit_map<A: MapAccess<'de>>(self, mut object: A) -> Result<Self::Value, A::Error> {
        let mut values = BTreeMap::new();
        while let Some(name) = object.next_key::<String>()? {
            if name == METADATA {
                object.next_value::<IgnoredAny>()?;
                continue;
            }
            match values.entry(name) {
                Entry::Vacant(place) => {
                    place.insert(object.next_value()?);
                }
                Entry::Occupied(place) => {
                    let name = place.key();
                    return Err(A::Error::custom(format_args!(
                        "the tensor {name:?} is named twice"
                    )));
                }
            }
        }
        Ok(ByTensor(values))
    }
}
