//! Where the vendors' libraries are looked for, and how they are loaded.

use std::env;
use std::error::Error;
use std::ffi::{CStr, c_char, c_int};
use std::mem::{self, ManuallyDrop};
use std::path::{Path, PathBuf};

use libloading::Library;

use crate::driver::Driver;
use crate::{Api, Blas, Compiler, GpuError};

/// Where libraries are looked for.
#[derive(Clone, Debug)]
pub struct Libraries {
    loader: bool,
    folders: Vec<PathBuf>,
}

impl Libraries {
    /// The loader's own way first (`LD_LIBRARY_PATH`, `ld.so.conf`), then the folder
    /// `.libtorch/cuda/lib` beside or above the program (up to three folders up, which is the root
    /// of a source tree for a program in `target/release/examples`), then
    /// `/usr/local/cuda/lib64` and `/opt/rocm/lib`.
    #[must_use]
    pub fn system() -> Self {
        let program = env::current_exe().unwrap_or_default();
        let near = program.ancestors().skip(1).take(4).map(|at| at.join(".libtorch/cuda/lib"));
        let fixed = ["/usr/local/cuda/lib64", "/opt/rocm/lib"].map(PathBuf::from);
        Self { loader: true, folders: near.chain(fixed).collect() }
    }

    /// These folders and nothing else.
    #[must_use]
    pub fn only(folders: impl IntoIterator<Item = PathBuf>) -> Self {
        Self { loader: false, folders: folders.into_iter().collect() }
    }

    /// The file of each library that a device of `api` needs when it runs: the driver, the run-time
    /// compiler and BLAS, in this order. Needs no device.
    ///
    /// # Errors
    ///
    /// [`GpuError::MissingLibrary`] in place of a library that cannot be loaded, in one line.
    pub fn needed(&self, api: Api) -> [Result<String, GpuError>; 3] {
        let wanted = [Driver::wanted(api), Compiler::wanted(api), Blas::wanted(api)];
        wanted.map(|wanted| self.load(&wanted).map(|library| library.name))
    }

    /// The first of `names` that can be loaded, each name tried everywhere before the next.
    pub(crate) fn load(&self, wanted: &Wanted) -> Result<Loaded, GpuError> {
        let mut faults = Vec::new();
        for name in wanted.names {
            let by_name = self.loader.then(|| PathBuf::from(name));
            let files = self.folders.iter().map(|folder| folder.join(name));
            for file in by_name.into_iter().chain(files.filter(|file| file.exists())) {
                match open(&file) {
                    Ok(library) => return Ok(Loaded::new(library, &file)),
                    Err(error) => faults.extend(fault(name, &error)),
                }
            }
        }
        let mut what = format!("{} ({})", wanted.what, wanted.names.join(", "));
        if !faults.is_empty() {
            what = format!("{what} that can be loaded ({})", faults.join("; "));
        }
        Err(GpuError::MissingLibrary { what, help: wanted.help })
    }
}

/// What the loader has against a file; `None` for one that is not there.
fn fault(name: &str, error: &libloading::Error) -> Option<String> {
    let text = error.source().unwrap_or(error).to_string();
    let is_absent = text.starts_with(&format!("{name}: cannot open shared object file"));
    (!is_absent).then_some(text)
}

/// A library that is asked for.
pub(crate) struct Wanted {
    pub(crate) what: &'static str,
    pub(crate) names: &'static [&'static str],
    pub(crate) help: &'static str,
}

/// A loaded library. It is never unloaded: the vendors' libraries start threads and register exit
/// handlers, which would outlive their code.
pub(crate) struct Loaded {
    library: ManuallyDrop<Library>,
    name: String,
}

impl Loaded {
    fn new(library: Library, file: &Path) -> Self {
        Self { library: ManuallyDrop::new(library), name: file.display().to_string() }
    }

    /// Loads another library from the same folder, if it is there, so that the loader finds it by
    /// its name when this one asks for it.
    pub(crate) fn load_beside(&self, name: &str) {
        let file = Path::new(&self.name).with_file_name(name);
        if let Some(library) = file.exists().then(|| open(&file).ok()).flatten() {
            mem::forget(library);
        }
    }

    /// A function by its name, without a check of its type.
    ///
    /// # Safety
    ///
    /// `F` is the type of a pointer to the C function `symbol`.
    pub(crate) unsafe fn function<F: Copy>(&self, symbol: &str) -> Result<F, GpuError> {
        // SAFETY: the caller vouches for the type, and the library stays loaded for ever.
        let found = unsafe { self.library.get::<F>(symbol.as_bytes()) };
        found.map(|symbol| *symbol).map_err(|_| GpuError::MissingSymbol {
            library: self.name.clone(),
            symbol: symbol.to_owned(),
        })
    }

    /// The function by the first of the names that the library has.
    ///
    /// # Safety
    ///
    /// `F` is the type of a pointer to the C function of either name.
    pub(crate) unsafe fn first_function<F: Copy>(
        &self,
        names: [&'static str; 2],
    ) -> Result<Entry<F>, GpuError> {
        let [first, second] = names;
        // SAFETY: the caller vouches for the type.
        if let Ok(call) = unsafe { self.function(first) } {
            return Ok(Entry { name: first, call });
        }
        // SAFETY: the caller vouches for the type.
        Ok(Entry { name: second, call: unsafe { self.function(second)? } })
    }
}

/// A C function and its name for errors.
#[derive(Clone, Copy)]
pub(crate) struct Entry<F> {
    pub(crate) name: &'static str,
    pub(crate) call: F,
}

/// A library's function from its codes to texts.
pub(crate) type Describe = unsafe extern "C" fn(c_int) -> *const c_char;

/// The error of a code other than 0.
pub(crate) fn check(describe: Describe, call: &'static str, code: c_int) -> Result<(), GpuError> {
    if code == 0 {
        return Ok(());
    }
    // SAFETY: any code may be asked for.
    Err(GpuError::Call { call, code, text: unsafe { text_of(describe(code)) } })
}

/// A library's own text.
///
/// # Safety
///
/// `text` is null or a constant of the library, a C string.
pub(crate) unsafe fn text_of(text: *const c_char) -> String {
    if text.is_null() {
        return "an error without a text".to_owned();
    }
    // SAFETY: a C string, and its library is never unloaded.
    unsafe { CStr::from_ptr(text) }.to_string_lossy().into_owned()
}

/// A table of C functions that CUDA and ROCm have under two names, and a method for each, which
/// turns the vendor's code into an error through the table's own `check(name, code)`.
macro_rules! c_table {
    (
        struct $table:ident $(($text:ident = $text_cuda:literal, $text_hip:literal))?;
        $($(#[$meta:meta])* $method:ident($($arg:ident: $ty:ty),*) = $cuda:literal, $hip:literal;)*
    ) => {
        pub(crate) struct $table {
            $($text: $crate::library::Describe,)?
            $($method: $crate::library::Entry<unsafe extern "C" fn($($ty),*) -> std::ffi::c_int>,)*
        }

        impl $table {
            /// Every function by its name in `library`.
            fn fill(
                library: &$crate::library::Loaded,
                api: $crate::Api,
            ) -> Result<Self, $crate::GpuError> {
                $(let $text = {
                    let name = match api {
                        $crate::Api::Cuda => $text_cuda,
                        $crate::Api::Rocm => $text_hip,
                    };
                    // SAFETY: the type is that of the vendor's header for this name.
                    unsafe { library.function(name)? }
                };)?
                $(let $method = {
                    let name = match api { $crate::Api::Cuda => $cuda, $crate::Api::Rocm => $hip };
                    // SAFETY: the type is that of the vendor's header for this name.
                    let call = unsafe { library.function(name)? };
                    $crate::library::Entry { name, call }
                };)*
                Ok(Self { $($text,)? $($method,)* })
            }

            $(fn check(
                &self,
                call: &'static str,
                code: std::ffi::c_int,
            ) -> Result<(), $crate::GpuError> {
                $crate::library::check(self.$text, call, code)
            })?

            $($(#[$meta])*
            /// # Safety
            ///
            /// The arguments are what the vendor's documentation of the function asks for.
            pub(crate) unsafe fn $method(&self $(, $arg: $ty)*) -> Result<(), $crate::GpuError> {
                // SAFETY: the caller vouches for the arguments.
                let code = unsafe { (self.$method.call)($($arg),*) };
                self.check(self.$method.name, code)
            })*
        }
    };
}
pub(crate) use c_table;

fn open(file: &Path) -> Result<Library, libloading::Error> {
    // SAFETY: loading runs the library's constructors; the names are those of the vendors'
    // libraries, which any program may load at any time.
    unsafe { Library::new(file) }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn absence_is_one_line_with_the_way_out() {
        let wanted = Wanted { what: "a thing", names: &["libnone.so.1"], help: "get one" };
        let error = Libraries::only([]).load(&wanted).err().unwrap().to_string();
        assert_eq!(error, "a thing (libnone.so.1) was not found; get one");
    }

    #[test]
    fn a_file_that_is_no_library_is_told() {
        let folder = tempfile::tempdir().unwrap();
        std::fs::write(folder.path().join("libnone.so.1"), b"text").unwrap();
        let wanted = Wanted { what: "a thing", names: &["libnone.so.1"], help: "get one" };
        let found = Libraries::only([folder.path().to_owned()]).load(&wanted);
        let error = found.err().unwrap().to_string();
        assert!(error.starts_with("a thing (libnone.so.1) that can be loaded ("), "{error}");
        assert!(error.ends_with(") was not found; get one"), "{error}");
        assert_eq!(error.lines().count(), 1);
    }
}
