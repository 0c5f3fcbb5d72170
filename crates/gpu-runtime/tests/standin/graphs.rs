//! Launches, captures and replays.

use gpu_runtime::{Api, Args, Buffer, Gpu, GpuError, Kernel, Launch, Program, Stream};

use crate::libraries::Standin;
use crate::{BOTH, SOURCE};

fn add_one(gpu: &Gpu) -> Kernel {
    let program = Program { name: "add_one", sources: &SOURCE, defines: &[] };
    gpu.compile(&program).unwrap().kernel("add_one").unwrap()
}

/// Adds one to the elements from `skip` on.
fn launch(
    stream: &Stream,
    kernel: &Kernel,
    x: &mut Buffer<f32>,
    skip: usize,
) -> Result<(), GpuError> {
    let n = x.len() - skip;
    let mut args = Args::new();
    args.view_mut(x.view_mut()).i64(skip as i64).i32(n as i32);
    // SAFETY: the stand-in's kernel takes these arguments and writes `x[skip..skip + n]`.
    unsafe { stream.launch(kernel, Launch::linear(1, 256), &args) }
}

#[test]
fn arguments_reach_the_kernel() {
    for api in BOTH {
        let standin = Standin::new(api);
        let gpu = standin.open();
        let (stream, kernel) = (gpu.stream().unwrap(), add_one(&gpu));
        let mut x = gpu.alloc_zeroed::<f32>(4).unwrap();
        launch(&stream, &kernel, &mut x, 1).unwrap();
        launch(&stream, &kernel, &mut x, 3).unwrap();
        assert_eq!(stream.download(&x).unwrap(), [0.0, 1.0, 1.0, 2.0]);
    }
}

#[test]
fn a_launch_that_the_driver_refuses_is_an_error() {
    let standin = Standin::new(Api::Cuda);
    let gpu = standin.open();
    let (stream, kernel) = (gpu.stream().unwrap(), add_one(&gpu));
    let mut x = gpu.alloc_zeroed::<f32>(4).unwrap();
    let mut args = Args::new();
    args.ptr(x.view_mut().ptr()).i64(0).i32(4);
    // SAFETY: the stand-in's kernel takes these arguments.
    let error = unsafe { stream.launch(&kernel, Launch::linear(0, 32), &args) }.unwrap_err();
    assert!(error.to_string().starts_with("cuLaunchKernel failed: "), "{error}");

    let other = standin.open();
    let error = launch(&other.stream().unwrap(), &kernel, &mut x, 0).unwrap_err();
    assert_eq!(error.to_string(), "kernel add_one is of another device");
}

#[test]
fn a_graph_runs_what_was_captured_and_nothing_before() {
    for api in BOTH {
        let standin = Standin::new(api);
        let gpu = standin.open();
        let (stream, kernel) = (gpu.stream().unwrap(), add_one(&gpu));
        let mut x = gpu.alloc_zeroed::<f32>(4).unwrap();
        let mut y = gpu.alloc_zeroed::<f32>(4).unwrap();
        let graph = stream
            .capture(|stream| {
                launch(stream, &kernel, &mut x, 0)?;
                stream.copy(&x, &mut y)?;
                stream.fill_bytes(x.slice_mut(2..), 0)
            })
            .unwrap();
        assert_eq!(graph.n_nodes(), 3);
        assert_eq!(stream.download(&y).unwrap(), [0.0; 4]);
        stream.replay(&graph).unwrap();
        stream.replay(&graph).unwrap();
        assert_eq!(stream.download(&y).unwrap(), [2.0, 2.0, 1.0, 1.0]);
    }
}

#[test]
fn a_graph_keeps_what_it_uses() {
    let standin = Standin::new(Api::Cuda);
    let gpu = standin.open();
    let stream = gpu.stream().unwrap();
    let mut y = gpu.alloc_zeroed::<f32>(4).unwrap();
    let graph = {
        let kernel = add_one(&gpu);
        let mut x = gpu.alloc_zeroed::<f32>(4).unwrap();
        let capture = stream.capture(|stream| {
            launch(stream, &kernel, &mut x, 0)?;
            stream.copy(&x, &mut y)
        });
        capture.unwrap()
    };
    assert_eq!((standin.calls("cuMemFree_v2"), standin.calls("cuModuleUnload")), (0, 0));
    stream.replay(&graph).unwrap();
    assert_eq!(stream.download(&y).unwrap(), [1.0; 4]);
    drop(graph);
    assert_eq!((standin.calls("cuMemFree_v2"), standin.calls("cuModuleUnload")), (1, 1));
    drop((gpu, stream, y));
    assert_eq!(standin.live(), 0);
}

#[test]
fn a_capture_that_fails_leaves_the_stream_usable() {
    for api in BOTH {
        let standin = Standin::new(api);
        let gpu = standin.open();
        let (stream, kernel) = (gpu.stream().unwrap(), add_one(&gpu));
        let mut x = gpu.alloc_zeroed::<f32>(4).unwrap();

        let error = stream.capture(|stream| {
            launch(stream, &kernel, &mut x, 0)?;
            Err(GpuError::Invalid("on purpose".to_owned()))
        });
        assert_eq!(error.unwrap_err().to_string(), "on purpose");

        let panicked = std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| {
            stream.capture(|_| panic!("on purpose"))
        }));
        panicked.unwrap_err();

        // Blocking calls are refused before the driver hears of them.
        let error = stream.capture(|stream| stream.synchronize()).unwrap_err().to_string();
        assert_eq!(error, "synchronize waits for the device: not inside a capture");
        stream.capture(|stream| stream.upload(&[0.0; 4], &mut x)).unwrap_err();
        stream.capture(|stream| stream.download(&x).map(drop)).unwrap_err();
        stream.capture(|stream| stream.capture(|_| Ok(())).map(drop)).unwrap_err();

        // An allocation breaks the capture itself, even if its error is passed over.
        let error = stream.capture(|_| {
            gpu.alloc::<f32>(1).unwrap_err();
            Ok(())
        });
        assert!(error.unwrap_err().to_string().contains("capture broken"));

        let graph = stream.capture(|stream| launch(stream, &kernel, &mut x, 0)).unwrap();
        stream.replay(&graph).unwrap();
        assert_eq!(stream.download(&x).unwrap(), [1.0; 4]);
        drop((graph, kernel, stream, x, gpu));
        assert_eq!(standin.live(), 0, "{api}");
    }
}

#[test]
fn a_failure_of_the_driver_in_a_capture_is_told() {
    let standin = Standin::new(Api::Cuda);
    let gpu = standin.open();
    let (stream, kernel) = (gpu.stream().unwrap(), add_one(&gpu));
    let mut x = gpu.alloc_zeroed::<f32>(4).unwrap();
    for name in ["cuStreamBeginCapture_v2", "cuGraphInstantiateWithFlags", "cuGraphGetNodes"] {
        standin.fail(name, 1);
        let capture = stream.capture(|stream| launch(stream, &kernel, &mut x, 0));
        let error = capture.unwrap_err().to_string();
        assert_eq!(error, format!("{name} failed: stand-in: invalid value (code 1)"));
        stream.synchronize().unwrap();
    }
    let graph = stream.capture(|stream| launch(stream, &kernel, &mut x, 0)).unwrap();
    assert_eq!(stream.download(&x).unwrap(), [0.0; 4]);
    stream.capture(|stream| stream.replay(&graph)).unwrap_err();
    standin.fail("cuGraphLaunch", 700);
    stream.replay(&graph).unwrap_err();
    let other = standin.open().stream().unwrap();
    assert_eq!(other.replay(&graph).unwrap_err().to_string(), "the graph is of another device");
}

#[test]
fn a_second_stream_is_not_drawn_into_a_capture() {
    let standin = Standin::new(Api::Cuda);
    let gpu = standin.open();
    let (stream, other) = (gpu.stream().unwrap(), gpu.stream().unwrap());
    let event = gpu.event().unwrap();
    let graph = stream.capture(|stream| {
        stream.record(&event)?;
        other.wait(&event).unwrap_err();
        Ok(())
    });
    graph.unwrap();
    stream.record(&event).unwrap();
    other.wait(&event).unwrap();
}
