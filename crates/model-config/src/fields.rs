//! Fields of an object inside the config.

use serde::de::DeserializeOwned;
use serde_json::{Map, Value};

use crate::error::ConfigError;
use crate::raw::{RawConfig, take};
use crate::validate::{positive, size};

/// Takes fields out of a nested object, naming them `outer.inner` in errors.
pub(crate) struct Fields<'a> {
    pub(crate) raw: &'a RawConfig,
    outer: String,
    object: Map<String, Value>,
}

impl<'a> Fields<'a> {
    pub(crate) fn of(
        raw: &'a RawConfig,
        outer: impl Into<String>,
        object: Option<&Map<String, Value>>,
    ) -> Option<Self> {
        object.map(|object| Self { raw, outer: outer.into(), object: object.clone() })
    }

    /// What errors call the object.
    pub(crate) fn outer(&self) -> &str {
        &self.outer
    }

    pub(crate) fn name(&self, field: &str) -> String {
        format!("{}.{field}", self.outer)
    }

    pub(crate) fn take<T: DeserializeOwned>(
        &mut self,
        field: &str,
    ) -> Result<Option<T>, ConfigError> {
        take(&self.raw.file, &mut self.object, field).map_err(|error| match error {
            ConfigError::Invalid { reason, .. } => self.raw.invalid(&self.name(field), reason),
            other => other,
        })
    }

    /// Puts what `rewritten` makes of a field, if anything, in its place.
    pub(crate) fn rewrite(&mut self, field: &str, rewritten: impl Fn(&Value) -> Option<Value>) {
        if let Some(value) = self.object.get_mut(field)
            && let Some(new) = rewritten(value)
        {
            *value = new;
        }
    }

    /// An object inside this one.
    pub(crate) fn object(&mut self, field: &str) -> Result<Option<Self>, ConfigError> {
        let object: Option<Map<String, Value>> = self.take(field)?;
        Ok(Self::of(self.raw, self.name(field), object.as_ref()))
    }

    /// The objects inside this one, by name.
    pub(crate) fn objects(mut self) -> Result<Vec<(String, Self)>, ConfigError> {
        let names: Vec<String> = self.object.keys().cloned().collect();
        let mut objects = Vec::new();
        for name in names {
            if let Some(object) = self.object(&name)? {
                objects.push((name, object));
            }
        }
        Ok(objects)
    }

    pub(crate) fn size(&mut self, field: &str) -> Result<usize, ConfigError> {
        let value = self.take(field)?;
        size(self.raw, &self.name(field), value)
    }

    pub(crate) fn positive_or(&mut self, field: &str, default: f64) -> Result<f64, ConfigError> {
        let value = self.take(field)?;
        positive(self.raw, &self.name(field), value, default)
    }

    pub(crate) fn not_negative_or(
        &mut self,
        field: &str,
        default: f64,
    ) -> Result<f64, ConfigError> {
        let value: f64 = self.take(field)?.unwrap_or(default);
        if value >= 0.0 && value.is_finite() {
            Ok(value)
        } else {
            let reason = format!("is {value}; it must not be negative");
            Err(self.raw.invalid(&self.name(field), reason))
        }
    }
}
