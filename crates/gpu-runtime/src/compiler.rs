//! The run-time compilers: NVRTC and hipRTC.

use std::ffi::{CString, c_char, c_int};
use std::path::Path;

use crate::cache::{self, Found, Key};
use crate::driver::Handle;
use crate::error::invalid;
use crate::library::{Libraries, Wanted, c_table};
use crate::{Api, GpuError};

/// A program in CUDA C++, of the part that HIP compiles too.
#[derive(Clone, Copy, Debug)]
pub struct Program<'a> {
    /// Its name in messages.
    pub name: &'a str,
    /// Name and text of each source. The first one is compiled; it may include the others by name.
    pub sources: &'a [(&'a str, &'a str)],
    /// Macros and their values.
    pub defines: &'a [(&'a str, String)],
}

c_table! {
    struct Rtc(error_string = "nvrtcGetErrorString", "hiprtcGetErrorString");
    version(major: *mut c_int, minor: *mut c_int) = "nvrtcVersion", "hiprtcVersion";
    #[expect(clippy::too_many_arguments, reason = "the vendors' function")]
    create_program(
        program: *mut Handle, source: *const c_char, name: *const c_char,
        n_headers: c_int, headers: *const *const c_char, names: *const *const c_char
    ) = "nvrtcCreateProgram", "hiprtcCreateProgram";
    destroy_program(program: *mut Handle) = "nvrtcDestroyProgram", "hiprtcDestroyProgram";
    compile_program(program: Handle, n_options: c_int, options: *const *const c_char)
        = "nvrtcCompileProgram", "hiprtcCompileProgram";
    get_log_size(program: Handle, bytes: *mut usize)
        = "nvrtcGetProgramLogSize", "hiprtcGetProgramLogSize";
    get_log(program: Handle, log: *mut c_char) = "nvrtcGetProgramLog", "hiprtcGetProgramLog";
    get_code_size(program: Handle, bytes: *mut usize)
        = "nvrtcGetCUBINSize", "hiprtcGetCodeSize";
    get_code(program: Handle, code: *mut c_char) = "nvrtcGetCUBIN", "hiprtcGetCode";
}

/// A run-time compiler. It needs no GPU.
pub struct Compiler {
    rtc: Rtc,
    api: Api,
    version: (c_int, c_int),
}

impl Compiler {
    pub(crate) fn wanted(api: Api) -> Wanted {
        match api {
            Api::Cuda => Wanted {
                what: "the run-time compiler of CUDA",
                names: &["libnvrtc.so.13", "libnvrtc.so.12"],
                help: "install CUDA 12 or 13, or the package nvidia-cuda-nvrtc, and put its lib \
                       folder on LD_LIBRARY_PATH",
            },
            Api::Rocm => Wanted {
                what: "the run-time compiler of ROCm",
                names: &["libhiprtc.so.7", "libhiprtc.so.6", "libhiprtc.so"],
                help: "install ROCm 6 or later (package hip-runtime-amd; Debian: libhiprtc6) or a \
                       ROCm build of PyTorch, and put its lib folder on LD_LIBRARY_PATH",
            },
        }
    }

    /// Loads the vendor's compiler.
    ///
    /// # Errors
    ///
    /// [`GpuError::MissingLibrary`] where it is not installed, in one line.
    pub fn load(api: Api, libraries: &Libraries) -> Result<Self, GpuError> {
        let library = libraries.load(&Self::wanted(api))?;
        let rtc = Rtc::fill(&library, api)?;
        let mut version = (0, 0);
        // SAFETY: both numbers are written where they point.
        unsafe { rtc.version(&mut version.0, &mut version.1) }?;
        if api == Api::Cuda {
            // NVRTC opens it by name and would not look in its own folder.
            library.load_beside(&format!("libnvrtc-builtins.so.{}.{}", version.0, version.1));
        }
        Ok(Self { rtc, api, version })
    }

    /// Machine code of a program for an architecture (`sm_90`, `gfx942`).
    ///
    /// # Errors
    ///
    /// [`GpuError::Compile`] with the compiler's log.
    pub fn compile(&self, arch: &str, program: &Program<'_>) -> Result<Vec<u8>, GpuError> {
        let strings = |texts: &mut dyn Iterator<Item = &str>| {
            texts.map(CString::new).collect::<Result<Vec<_>, _>>().map_err(|_| {
                GpuError::Invalid(format!("a text of program {} has a zero byte", program.name))
            })
        };
        let names = strings(&mut program.sources.iter().map(|(name, _)| *name))?;
        let texts = strings(&mut program.sources.iter().map(|(_, text)| *text))?;
        let options = self.options(arch, program);
        let options = strings(&mut options.iter().map(String::as_str))?;
        let pointers = |texts: &[CString]| texts.iter().map(|t| t.as_ptr()).collect::<Vec<_>>();
        let (names, texts, options) = (pointers(&names), pointers(&texts), pointers(&options));
        let (Some((&name, names)), Some((&text, texts))) =
            (names.split_first(), texts.split_first())
        else {
            return invalid(format!("program {} has no source", program.name));
        };
        let mut raw = Handle::NULL;
        let n_headers = names.len() as c_int;
        // SAFETY: C strings that live until the end of this function, in arrays of that length.
        unsafe {
            let (texts, names) = (texts.as_ptr(), names.as_ptr());
            self.rtc.create_program(&mut raw, text, name, n_headers, texts, names)
        }?;
        let made = Made { rtc: &self.rtc, raw };
        let n_options = options.len() as c_int;
        // SAFETY: as for `create_program`.
        let outcome = unsafe { self.rtc.compile_program(raw, n_options, options.as_ptr()) };
        match outcome {
            Ok(()) => made.take(Rtc::get_code_size, Rtc::get_code),
            Err(error) => Err(made.fault(program.name, &error)),
        }
    }

    /// As [`Compiler::compile`], through a folder of entries.
    pub(crate) fn compile_cached(
        &self,
        arch: &str,
        program: &Program<'_>,
        folder: Option<&Path>,
    ) -> Result<(Vec<u8>, Found), GpuError> {
        let file = folder.map(|folder| folder.join(self.key(arch, program)));
        if let Some(code) = file.as_deref().and_then(cache::read) {
            return Ok((code, Found::InCache));
        }
        let code = self.compile(arch, program)?;
        let found = match file.map(|file| (cache::write(&file, &code), file)) {
            None => Found::NotCached("there is no folder for it".to_owned()),
            Some((Ok(()), _)) => Found::Compiled,
            Some((Err(error), file)) => Found::NotCached(format!("{}: {error}", file.display())),
        };
        Ok((code, found))
    }

    /// The options hold the architecture and the macros.
    fn key(&self, arch: &str, program: &Program<'_>) -> String {
        let mut key = Key::default();
        key.part(format!("{} {}.{}", self.api, self.version.0, self.version.1).as_bytes());
        let options = self.options(arch, program);
        key.part(&(options.len() as u64).to_le_bytes());
        for option in &options {
            key.part(option.as_bytes());
        }
        for (name, text) in program.sources {
            key.part(name.as_bytes()).part(text.as_bytes());
        }
        key.file_name()
    }

    fn options(&self, arch: &str, program: &Program<'_>) -> Vec<String> {
        let mut options = match self.api {
            Api::Cuda => {
                // Hopper's matrix unit is a feature of that device alone.
                let own = if arch == "sm_90" { "a" } else { "" };
                // Line numbers cost no time and tell profilers and sanitizers where they are.
                vec![format!("--gpu-architecture={arch}{own}"), "--generate-line-info".into()]
            }
            Api::Rocm => vec![format!("--offload-arch={arch}"), "-O3".into()],
        };
        options.push("-std=c++17".into());
        options.extend(program.defines.iter().map(|(name, value)| format!("-D{name}={value}")));
        options
    }
}

/// A program in the compiler's memory.
struct Made<'a> {
    rtc: &'a Rtc,
    raw: Handle,
}

type GetSize = unsafe fn(&Rtc, Handle, *mut usize) -> Result<(), GpuError>;
type GetBytes = unsafe fn(&Rtc, Handle, *mut c_char) -> Result<(), GpuError>;

impl Made<'_> {
    /// Bytes that the compiler tells the length of, then writes.
    fn take(&self, size: GetSize, bytes: GetBytes) -> Result<Vec<u8>, GpuError> {
        let mut n = 0;
        // SAFETY: the program lives; the size is written where it points.
        unsafe { size(self.rtc, self.raw, &mut n) }?;
        let mut taken = vec![0; n];
        // SAFETY: the compiler writes the `n` bytes that it told.
        unsafe { bytes(self.rtc, self.raw, taken.as_mut_ptr().cast()) }?;
        Ok(taken)
    }

    fn fault(&self, program: &str, error: &GpuError) -> GpuError {
        let log = self.take(Rtc::get_log_size, Rtc::get_log).unwrap_or_default();
        let log = String::from_utf8_lossy(&log);
        let log = match log.trim_end_matches('\0').trim() {
            "" => error.to_string(),
            log => log.to_owned(),
        };
        GpuError::Compile { program: program.to_owned(), log }
    }
}

impl Drop for Made<'_> {
    fn drop(&mut self) {
        // SAFETY: made by `create_program` and destroyed here alone.
        let _ = unsafe { self.rtc.destroy_program(&mut self.raw) };
    }
}

/// Machine code of a program for an architecture (`sm_90`, `gfx942`), without a GPU: the check of a
/// source on a machine that has the compiler alone. No cache.
///
/// # Errors
///
/// As [`Compiler::load`] from [`Libraries::system`], and as [`Compiler::compile`].
pub fn compile_only(api: Api, arch: &str, program: &Program<'_>) -> Result<Vec<u8>, GpuError> {
    Compiler::load(api, &Libraries::system())?.compile(arch, program)
}
